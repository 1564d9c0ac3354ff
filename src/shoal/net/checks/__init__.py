"""From what was seen to what it means and the command that mends it. Pure: facts in, findings out."""
