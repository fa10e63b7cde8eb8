"""From the name of a model to weights in memory, and from a sample to token ids.

In: an alias, a folder or a hub id; samples. Out: OpenModel (files at hand), LoadedModel (weights), Prompt.
May import: contract.
"""
