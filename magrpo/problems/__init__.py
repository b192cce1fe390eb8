"""Problem sets."""

TABLE = {
    "coopcode": "magrpo.problems.coopcode:CoopCode",
    "humaneval": "magrpo.problems.humaneval:HumanEval",
    "coophumaneval": "magrpo.problems.humaneval:CoopHumanEval",
    "humanevalplus": "magrpo.problems.evalplus:HumanEvalPlus",
    "mbpp": "magrpo.problems.mbpp:Mbpp",
    "mbppplus": "magrpo.problems.evalplus:MbppPlus",
    "livecodebench": "magrpo.problems.livecodebench:LiveCodeBench",
    "apps": "magrpo.problems.apps:Apps",
    "codecontests": "magrpo.problems.code_contests:CodeContests",
    "notes": "magrpo.problems.notes:Notes",
    "tldr": "magrpo.problems.writing:Tldr",
    "arxiv": "magrpo.problems.writing:Arxiv",
}
