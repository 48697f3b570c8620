"""Between text and tokens: tokenizer, chat template, incremental detokenising, stop strings. No torch."""
