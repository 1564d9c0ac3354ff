"""Where ranks run: start this there, read that there."""
