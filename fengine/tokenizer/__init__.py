"""Between ids and text: what each token adds, streams with stop strings, chat templates. No torch."""
