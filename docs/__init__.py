"""Documents, and the script that writes the numbers in them."""
