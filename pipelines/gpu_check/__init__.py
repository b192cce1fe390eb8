"""The steps of ``magrpo doctor --gpu``: measurements of a GPU, each beside its expectation, small ones on a CPU."""
