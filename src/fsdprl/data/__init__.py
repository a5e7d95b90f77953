"""Files of prompts and examples: rows with their file and line, order, chat templates, tokens."""
