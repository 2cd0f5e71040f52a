"""Virtual time: a whole cluster in one process, exactly repeatable from one seed."""
