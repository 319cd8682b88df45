"""Between text and token ids: chat templates, tokenising, detokenising, stop strings."""
