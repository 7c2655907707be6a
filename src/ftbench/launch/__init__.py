"""How a spec becomes processes."""
