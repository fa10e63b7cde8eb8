if __name__ == "policies":
    raise ImportError("import kvbench.policies: the folder 'policies' is installed under that name")
