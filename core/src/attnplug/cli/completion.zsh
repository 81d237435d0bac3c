#compdef attnplug
# attnplug for zsh, after compinit: eval "$(attnplug completion zsh)"
_attnplug() {
    local -a commands
    if (( CURRENT == 2 )); then
        commands=(@NAMES@)
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case "$command" in
@COMMANDS@
    esac
}
compdef _attnplug attnplug
