"""The commands of ``magrpo``, one module for each command.

``pipelines/cli.py`` lists the commands and parses their arguments: begin there. ``inputs`` checks problems and models
before a run starts; ``dry_run``, ``first_prompts`` and ``plan_lines`` print the plan of a run; ``answer_view`` prints
answers.
"""
