"""Loading models: Hugging Face directories and hub ids, GGUF files, llama2.c files, aliases."""
