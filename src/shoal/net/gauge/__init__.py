"""What measures links between nodes. Standard library only: it runs with any Python, before anything is set up."""
