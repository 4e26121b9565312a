"""What only the demo needs: the program that writes its text."""
