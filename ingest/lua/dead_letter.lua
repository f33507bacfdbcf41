-- Moves an entry that cannot be answered to the dead letters. Repeating the call changes nothing.
-- KEYS 1 input stream, 2 dead letters, 3 statistics
-- ARGV 1 group, 2 entry, 3 owner, or empty: no engine has it, 4 reason, 5 error
-- Replies {"ok"} {"lost"}
-- include entries
-- include dead_letters
if ARGV[3] == '' then
  if not is_nobodys(KEYS[1], ARGV[1], ARGV[2]) then return {'lost'} end
elseif not is_pending(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then
  return {'lost'}
end
keep_dead_letter(KEYS[2], KEYS[3], KEYS[1], ARGV[2], ARGV[4], ARGV[5], '0')
remove_entry(KEYS[1], ARGV[1], ARGV[2])
return {'ok'}
