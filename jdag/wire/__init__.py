"""Encoding of messages as bytes, their exact sizes, and the order of their delivery."""
