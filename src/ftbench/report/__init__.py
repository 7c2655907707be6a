"""Reports about finished runs: tables, comparisons and cards. This package needs neither torch nor a GPU."""
