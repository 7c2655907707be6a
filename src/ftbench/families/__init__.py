"""What the layers of a family of models are, for the estimates and the worker alike."""

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "llama", "mistral", "qwen2")  # whose layers the estimates describe
