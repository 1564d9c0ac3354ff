"""Real machines over SSH: what names them, reaches them and prepares them."""
