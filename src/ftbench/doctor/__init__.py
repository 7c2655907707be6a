"""`ftbench doctor`: check this machine and a spec without importing torch in this process."""
