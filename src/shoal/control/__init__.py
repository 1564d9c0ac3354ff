"""What the processes of a run tell each other, and how they find each other. Torch-free; used by launch and by sync."""
