"""Read run directories and make tables and cards. This needs neither torch nor a GPU."""
