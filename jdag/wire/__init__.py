"""Messages as bytes, their exact sizes, and links that deliver them once in order."""
