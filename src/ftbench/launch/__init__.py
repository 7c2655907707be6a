"""Start the processes that train a spec, and watch them."""
