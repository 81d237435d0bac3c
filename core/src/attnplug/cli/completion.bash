# attnplug for bash: eval "$(attnplug completion bash)"
_attnplug() {
    local words= last=$COMP_CWORD current=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    # bash makes three words of --option=value
    [[ $current == "=" ]] && current= && ((last++))
    [[ ${COMP_WORDS[last - 1]} == "=" ]] && ((last--))
    case "${COMP_WORDS[last - 1]}" in
@VALUES@
        *) case "${COMP_WORDS[1]}" in
@COMMANDS@
        esac ;;
    esac
    ((COMP_CWORD == 1)) && words="@NAMES@ --help --version"
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _attnplug attnplug
