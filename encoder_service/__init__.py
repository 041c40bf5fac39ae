"""The server: its folders are the path of an image, and a module imports only from lower layers."""
