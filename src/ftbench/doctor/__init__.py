"""`ftbench doctor`: what is installed, what works on this machine, what to do about the rest. No torch here."""
