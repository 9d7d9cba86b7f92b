"""How good an image is, and how near to another. Imported only when used."""
