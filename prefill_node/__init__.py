"""A prefill replica: reads prompts, holds their KV, sends it to a decode node."""
