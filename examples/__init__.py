"""Programs that write example text and fine-tune an exported model with other libraries."""
