"""Sources of documents: repositories of the Hugging Face hub, and local files."""
