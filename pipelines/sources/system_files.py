"""Names of folders and files that systems put beside a user's own.

They are neither classes nor images of a data set, although a NAS's system folders are full of thumbnails. Names that
begin with a dot are hidden and left out anyway (macOS's .DS_Store and .Trashes, QNAP's .@__thumb, NetApp's .snapshot,
Jupyter's .ipynb_checkpoints); this module lists the others.
"""

from __future__ import annotations

# In lower case, because the file systems of Windows and macOS ignore case.
FOLDERS = {
    "@eadir": "Synology DSM: thumbnails and attributes (Knowledge Center, 'What is the @eaDir folder?')",
    "#recycle": "Synology DSM: recycle bin of a shared folder (Knowledge Center, 'Recycle Bin')",
    "#snapshot": "Synology DSM: snapshots of a shared folder (Snapshot Replication)",
    "@tmp": "Synology DSM: temporary files",
    "@sharebin": "Synology DSM: recycle bin of Synology Drive",
    "@recycle": "QNAP QTS: Network Recycle Bin (QTS User Guide)",
    "@recently-snapshot": "QNAP QTS: snapshots of a shared folder (QTS User Guide)",
    "lost+found": "ext2 to ext4: pieces that fsck finds; readable by root alone (mklost+found(8))",
    "$recycle.bin": "Windows since Vista: recycle bin of a drive",
    "recycler": "Windows NT to XP: recycle bin of a drive",
    "system volume information": "Windows: restore points and indexes of a drive",
    "found.000": "Windows: pieces that chkdsk finds",
    "__macosx": "macOS Archive Utility: resource forks in a zip file",
    "network trash folder": "macOS, AFP servers (netatalk): trash",
    "temporary items": "macOS, AFP servers (netatalk): temporary files",
    "lost.dir": "Android: pieces that fsck finds on a memory card",
    "~snapshot": "NetApp ONTAP: snapshots seen through SMB",
    "__pycache__": "Python: compiled modules (PEP 3147)",
}
FILES = {
    "thumbs.db": "Windows Explorer: thumbnails",
    "ehthumbs.db": "Windows Media Center: thumbnails",
    "ehthumbs_vista.db": "Windows Media Center: thumbnails",
    "desktop.ini": "Windows Explorer: how a folder is shown",
    "icon\r": "macOS Finder: a folder's own icon",
}


def is_system(name: str) -> bool:
    """Whether systems make folders or files with this name."""
    return name.lower() in FOLDERS or name.lower() in FILES
