"""Problem sets."""

TABLE = {
    "coopcode": "magrpo.problems.coopcode:CoopCode",
    "humaneval": "magrpo.problems.humaneval:HumanEval",
    "coophumaneval": "magrpo.problems.humaneval:CoopHumanEval",
    "humanevalplus": "magrpo.problems.evalplus:HumanEvalPlus",
    "mbpp": "magrpo.problems.mbpp:Mbpp",
    "mbppplus": "magrpo.problems.evalplus:MbppPlus",
    "notes": "magrpo.problems.notes:Notes",
    "tldr": "magrpo.problems.writing:Tldr",
    "arxiv": "magrpo.problems.writing:Arxiv",
}
