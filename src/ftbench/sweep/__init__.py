"""Many runs, unattended: what to run next, where, and the table that is finished in the morning."""
