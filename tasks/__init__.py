if __name__ == "tasks":
    raise ImportError("import kvbench.tasks: the folder 'tasks' is installed under that name")
