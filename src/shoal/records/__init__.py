"""Read run folders: typed records of what a run wrote, and what follows from them."""
