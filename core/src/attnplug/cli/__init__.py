"""The command ``attnplug``. ``main`` is its entry; each command has a module, imported when it is called."""
