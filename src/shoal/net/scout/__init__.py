"""What looks around on a node. Standard library only: it runs there with any Python, before anything is set up."""
