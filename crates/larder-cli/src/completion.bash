_complete_PROGRAM() {
    # Bash splits words at characters such as ':' and '='. What no space separates is one word.
    local words=() word rest=$COMP_LINE trimmed index
    for ((index = 0; index <= COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        if ((index > 0)) && [[ $trimmed == "$rest" ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
        rest=${trimmed#"$word"}
    done
    local last=$((${#words[@]} - 1))
    local current=${words[last]} space=true
    compopt +o nospace 2>/dev/null && space=false
    local IFS=$'\013'
    # Unlike an unquoted substitution, read expands no pattern.
    read -r -a COMPREPLY <<<"$(
        _CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX="$last" _CLAP_COMPLETE_COMP_TYPE="$COMP_TYPE" \
            _CLAP_COMPLETE_SPACE="$space" VARIABLE=bash COMPLETER -- "${words[@]}" 2>/dev/null
    )"
    if [[ $space == false && ${COMPREPLY-} =~ [=/:]$ ]]; then
        compopt -o nospace
    fi
    # Readline replaces only what follows the last of these characters.
    if [[ $current == *[:=]* ]]; then
        local before=${current%"${current##*[:=]}"}
        COMPREPLY=("${COMPREPLY[@]#"$before"}")
    fi
}
complete -o nospace -o bashdefault -F _complete_PROGRAM PROGRAM
