"""A recorded trace → kernels by group, idle gaps, a timeline, and what differs between two of them. No torch here."""
