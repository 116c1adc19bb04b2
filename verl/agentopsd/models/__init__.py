"""Models that ship with the package, and the plain-torch code that trains and plays them."""
