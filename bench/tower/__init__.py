"""What the tower's benchmark is made of."""
