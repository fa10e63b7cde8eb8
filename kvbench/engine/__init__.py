"""One sample, all cells: read the context once, rank, evict, answer from every kept set, measure.

In: a LoadedModel, a Prompt, cells. Out: one Measurement or Failure per cell. Order of the flow: bind the
policies; attention, cache and forward read; observe, score, order and ranking rank while a pass (passes,
probe, hidden, stopwatch) is read; selection turns a budget into slots; compress is the loop over chunks;
answer, tree and write answer; future and measure give the numbers; evaluate puts it together. May import:
contract, model.
"""
