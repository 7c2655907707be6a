"""The worker process, which trains. Only this package imports transformers, trl and peft."""
