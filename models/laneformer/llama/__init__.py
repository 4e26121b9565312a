"""Models of the Llama family as Laneformers with delay 0: their config.json and their
tensors, translated at load.
"""
