"""Models of the Llama family as Laneformers with delay 0: config.json and tensors, translated at load."""
