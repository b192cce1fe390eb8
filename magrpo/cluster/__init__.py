"""Ray: the parts of a run that outgrow one process, as actors on this machine or on the nodes of a cluster.

Begin with :mod:`.connection`, through which a run reaches Ray. :mod:`.samplers` is an engine, :mod:`.ranks` computes
updates and :mod:`.jails` is a sandbox; :mod:`.dealing` hands work to the actors of samplers and jails, and gives it to
others when an actor dies. Only this package imports ray, and a run in one process does not import it.
"""
