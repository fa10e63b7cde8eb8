"""One sample, all cells: read the context once, rank, evict, answer from every kept set, measure.

In: a LoadedModel, a Prompt, cells. Out: one Measurement or Failure per cell.
Order of the flow: attention and cache, forward, score, order, ranking, selection, compress, answer and
write, evaluate.
May import: contract, model.
"""
