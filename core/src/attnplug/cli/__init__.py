"""The command ``attnplug``. ``main`` is its entry point. Each subcommand has a module, imported when it runs."""
