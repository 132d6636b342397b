"""Zero-shot tasks and perplexity on local files, with two engines that agree: ours and lm-evaluation-harness."""
