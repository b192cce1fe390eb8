"""Problem sets."""

TABLE = {
    "coopcode": "magrpo.problems.coopcode:CoopCode",
    "humaneval": "magrpo.problems.humaneval:HumanEval",
    "coophumaneval": "magrpo.problems.humaneval:CoopHumanEval",
    "mbpp": "magrpo.problems.mbpp:Mbpp",
    "tldr": "magrpo.problems.writing:Tldr",
    "arxiv": "magrpo.problems.writing:Arxiv",
}
