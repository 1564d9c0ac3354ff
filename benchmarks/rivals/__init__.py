"""What `recovery.py` compares: the same small GPT trained by others, and how a fault is made and measured."""
