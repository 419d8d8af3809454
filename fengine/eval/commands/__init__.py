"""The verbs of the command line about runs that are there: `fengine VERB RUN ...`, one file each."""
